// Command kueue runs Kueue's scheduler and its controllers of queues, Workloads and batch Jobs.
//
// Kueue's own program also serves webhooks and manages their certificates. Without webhooks, a Job must name its queue and be suspended when
// it is created.
package main

import (
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	configapi "sigs.k8s.io/kueue/apis/config/v1beta2"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	qcache "sigs.k8s.io/kueue/pkg/cache/queue"
	schdcache "sigs.k8s.io/kueue/pkg/cache/scheduler"
	"sigs.k8s.io/kueue/pkg/constants"
	"sigs.k8s.io/kueue/pkg/controller/core"
	"sigs.k8s.io/kueue/pkg/controller/core/indexer"
	"sigs.k8s.io/kueue/pkg/controller/jobframework"
	"sigs.k8s.io/kueue/pkg/controller/jobs/job"
	"sigs.k8s.io/kueue/pkg/scheduler"
	preemptexpectations "sigs.k8s.io/kueue/pkg/scheduler/preemption/expectations"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "kueue:", err)
		os.Exit(1)
	}
}

func run() error {
	ctrl.SetLogger(zap.New())
	ctx := ctrl.SetupSignalHandler()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, kueue.AddToScheme, configapi.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	configuration := &configapi.Configuration{}
	scheme.Default(configuration)
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	// The limits of Kueue's own configuration.
	config.QPS, config.Burst = 300, 500
	mgr, err := ctrl.NewManager(config, ctrl.Options{Scheme: scheme, Metrics: metricsserver.Options{BindAddress: "0"}})
	if err != nil {
		return err
	}
	preemptions := preemptexpectations.New()
	cache := schdcache.New(mgr.GetClient())
	requeuer := qcache.NewRequeuer()
	if err := mgr.Add(requeuer); err != nil {
		return err
	}
	queues := qcache.NewManager(mgr.GetClient(), cache, requeuer, qcache.WithPreemptionExpectations(preemptions))
	if err := indexer.Setup(ctx, mgr.GetFieldIndexer()); err != nil {
		return err
	}
	if err := job.SetupIndexes(ctx, mgr.GetFieldIndexer()); err != nil {
		return err
	}
	options := core.SetupControllersOpts{PreemptionExpectations: preemptions}
	if controller, err := core.SetupControllers(mgr, queues, cache, configuration, options); err != nil {
		return fmt.Errorf("controller %s: %w", controller, err)
	}
	reconciler, err := job.NewReconciler(ctx, mgr.GetClient(), mgr.GetFieldIndexer(), mgr.GetEventRecorder(constants.JobControllerName),
		jobframework.WithCache(cache), jobframework.WithQueues(queues), jobframework.WithManagedJobsNamespaceSelector(labels.Everything()))
	if err != nil {
		return err
	}
	if err := reconciler.SetupWithManager(mgr); err != nil {
		return err
	}
	jobframework.EnableIntegration(job.FrameworkName)
	go queues.CleanUpOnContext(ctx)
	go cache.CleanUpOnContext(ctx)
	recorder := mgr.GetEventRecorder(constants.AdmissionName)
	if err := mgr.Add(scheduler.New(queues, cache, mgr.GetClient(), recorder, scheduler.WithPreemptionExpectations(preemptions))); err != nil {
		return err
	}
	return mgr.Start(ctx)
}
